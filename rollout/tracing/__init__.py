"""Records of forwards, the engine speed fitted to them, and the timeline of a step."""
