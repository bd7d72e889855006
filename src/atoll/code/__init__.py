"""Code that calls tools: a registry of functions, and what runs the code that uses them."""
