"""Starting the processes of a run, here or on many machines."""
