"""Complete runs through the public commands; nothing here is imported by the packages."""
