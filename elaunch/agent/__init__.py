"""The agent: starts the workers of one node through its server, watches, decides, reports."""
