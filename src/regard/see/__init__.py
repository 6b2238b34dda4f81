"""What a person sees: the terminal, and the page that one offline file holds."""
