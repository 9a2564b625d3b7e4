"""The endpoint for programs that talk (Model Context Protocol), at /mcp: the service's functions as tools."""
