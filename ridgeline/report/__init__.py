"""What the HTML reports of `bench serve`, `diagnose` and `plan` share: style, tables, plots, words. Imports nothing else."""
