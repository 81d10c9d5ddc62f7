from ckpt_cli.main import run

if __name__ == "__main__":
    run()
