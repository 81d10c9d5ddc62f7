"""What commands show: text for a terminal, JSON, and pages."""
