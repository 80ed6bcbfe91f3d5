"""Plans as settings that real frameworks accept, and checks of the settings people have."""
