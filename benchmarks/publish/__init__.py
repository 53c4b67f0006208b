"""Publishing weights from trainers to engines."""
