"""Run fedmr_isic as a recipe: ``python jobs/fedmr_isic/job.py [--export --export-dir FOLDER]``."""

from nvflare.recipe import SimEnv

from tightframe_app.recipes import Recipe

if __name__ == "__main__":
    recipe = Recipe("fedmr_isic")
    run = recipe.execute(SimEnv(clients=list(recipe.job.sites)))
    print("results:", run.get_result())
