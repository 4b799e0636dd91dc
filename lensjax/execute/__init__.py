"""Running a step under its plan."""
