"""The web view: one page that shows the resources live, and, if asked for, changes them."""
