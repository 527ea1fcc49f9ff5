import os, shutil, subprocess, sys, venv

path, timeout, *requirements = sys.argv[1:]
os.makedirs(os.environ["TMPDIR"], exist_ok=True)
venv.create(path, system_site_packages=True, symlinks=True)
command = [path + "/bin/python", "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--no-cache-dir",
           "--progress-bar", "off", *requirements]
try:
    code = subprocess.run(command, timeout=int(timeout)).returncode
except subprocess.TimeoutExpired:
    print("the installation took longer than", timeout, "seconds", flush=True)
    code = 124
shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
sys.exit(code)
