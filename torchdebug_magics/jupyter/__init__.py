"""The only place that imports IPython or ipywidgets."""
