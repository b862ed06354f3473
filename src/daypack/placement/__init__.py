"""Where state lives between steps: on the parameter's device, or outside and brought in piece by piece."""
