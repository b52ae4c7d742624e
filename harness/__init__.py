"""How a job is run, measured, checked and kept; knows no model family."""
