"""How people and programs reach a runtime. Each surface translates errors in one function and decides nothing."""
