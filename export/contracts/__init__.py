"""What each engine's loader makes of a folder. Nothing here imports the code that writes the folders."""
