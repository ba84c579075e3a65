"""Programs, endings and files that nearpeak must survive, and must leave as they are without it."""
