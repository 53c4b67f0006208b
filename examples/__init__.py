"""Complete runs through the public commands; the packages import nothing from here."""
