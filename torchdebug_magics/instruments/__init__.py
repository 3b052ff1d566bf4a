"""One folder a capability: report (pure data), probe (collects), view (shows), and the row that registers them."""
