"""What each piece costs alone: durations and demands, with their source."""
