"""What must be computed: operators with shapes and names, no times."""
