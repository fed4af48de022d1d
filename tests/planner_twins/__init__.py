"""The planner's inner loops in Python, to read and to compare the compiled ones with."""
