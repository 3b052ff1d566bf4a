"""What is alive: ``census and ops -> blocks -> sites, timeline, snapshot``. Who holds it, and whether it grows, is not asked here."""
