"""What happens: two engines that run the same program to the same picosecond."""
