"""What the step is: the program, and what data flow says about it."""
