"""What the controller of a large run costs: the product's controller with stand-in engines and trainer ranks."""
