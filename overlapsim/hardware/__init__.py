"""What a machine is: devices, links, nodes and clusters, with the source of every number."""
