"""What a rank's process does, by the kind of its job: write references, check and time a split model, answer."""
