"""Answers of the planner: text, tables, pictures and pages."""
