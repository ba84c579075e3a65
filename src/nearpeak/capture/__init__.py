"""The ops of real code, from live or fake execution, as plain data."""
