"""What sampling calls: the implementations of the ops that run outside the program."""
