"""What is alive: ``census and ops -> blocks -> snapshot``. Who holds it, and whether it grows, is not asked here."""
