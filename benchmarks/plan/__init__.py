"""The planner: fits of its constants, validation against other planners and against `transformers`."""
