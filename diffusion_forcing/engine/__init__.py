"""The engine: training, runs, figures and the command line. It knows no domain but by name (`engine.recipes`)."""
