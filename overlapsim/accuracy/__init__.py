"""How near to the truth: one suite a file, each scoring predictions against measurements on committed splits."""
