"""The page behind ``npattn.explore``: what npattn computed, packed into one HTML file that only looks up, formats and colours."""
