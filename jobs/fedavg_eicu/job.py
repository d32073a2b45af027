"""Run fedavg_eicu as a recipe: ``python jobs/fedavg_eicu/job.py [--export --export-dir FOLDER]``."""

from nvflare.recipe import SimEnv

from tightframe_app.recipes import Recipe

if __name__ == "__main__":
    recipe = Recipe("fedavg_eicu")
    run = recipe.execute(SimEnv(clients=list(recipe.job.sites)))
    print("results:", run.get_result())
