"""A profile as one HTML file that needs nothing else: `page` makes it. README.md says how."""
