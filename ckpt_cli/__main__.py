from ckpt_cli.start import start

if __name__ == "__main__":
    start()
