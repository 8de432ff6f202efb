"""The settings: their typed tree (`tree`), readers of files (`reading`) and checks (`rules`)."""
