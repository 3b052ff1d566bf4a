"""What goes on growing: ``steps of a loop -> looks at what each variable holds -> what is meant -> the worst that is not``."""
