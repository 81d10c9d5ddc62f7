"""The options of commands: those that several share, and the values that they parse into."""
