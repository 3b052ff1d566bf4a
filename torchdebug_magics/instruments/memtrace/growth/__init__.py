"""What goes on growing: `loop_steps` -> `line_growth` (what stays of a line) -> `worst` (what of it leaks); `growth_watch` joins them."""
