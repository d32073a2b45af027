"""Run fedetf_isic_dp as a recipe: ``python jobs/fedetf_isic_dp/job.py [--export --export-dir FOLDER]``."""

from nvflare.recipe import SimEnv

from tightframe_app.recipes import Recipe

if __name__ == "__main__":
    recipe = Recipe("fedetf_isic_dp")
    run = recipe.execute(SimEnv(clients=list(recipe.job.sites)))
    print("results:", run.get_result())
