"""The six phases of bring-up: a spec, the views and a script each, and what the scripts share."""
