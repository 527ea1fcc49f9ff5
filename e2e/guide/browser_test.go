package guide_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// prepareBrowser installs what drives the browser.
func prepareBrowser(ctx context.Context, root string) error {
	return installBrowser(ctx, filepath.Join(root, "e2e", "browser"), filepath.Join(root, ".cache", "npm"))
}

// installBrowser installs the packages that drive the browser, unless the lock file's own are there.
func installBrowser(ctx context.Context, dir, cache string) error {
	locked, err := os.Stat(filepath.Join(dir, "package-lock.json"))
	if err != nil {
		return err
	}
	installed, err := os.Stat(filepath.Join(dir, "node_modules", ".package-lock.json"))
	if err == nil && !installed.ModTime().Before(locked.ModTime()) {
		return nil
	}
	install := exec.CommandContext(ctx, "npm", "ci", "--no-audit", "--no-fund", "--silent", "--cache", cache)
	install.Dir = dir
	if out, err := install.CombinedOutput(); err != nil {
		return fmt.Errorf("npm ci: %w: %s", err, out)
	}
	return nil
}
