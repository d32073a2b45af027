"""Run fedncm_heart as a recipe: ``python jobs/fedncm_heart/job.py [--export --export-dir FOLDER]``."""

from nvflare.recipe import SimEnv

from tightframe_app.recipes import Recipe

if __name__ == "__main__":
    recipe = Recipe("fedncm_heart")
    run = recipe.execute(SimEnv(clients=list(recipe.job.sites)))
    print("results:", run.get_result())
