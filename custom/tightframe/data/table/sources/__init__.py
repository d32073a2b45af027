"""Sources of a site's rows: text files, Parquet files, databases."""
