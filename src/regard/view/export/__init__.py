"""The page as one offline HTML file."""
