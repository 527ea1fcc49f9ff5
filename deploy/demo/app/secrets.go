package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
)

// digests are SHA-256 digests in hex, by the names of files.
type digests map[string]string

// readSecrets reads all files of the directory of secret parameters.
func (a *app) readSecrets() (digests, error) {
	found := digests{}
	if a.secretsDir == "" {
		return found, nil
	}
	entries, err := os.ReadDir(a.secretsDir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		content, err := os.ReadFile(filepath.Join(a.secretsDir, e.Name()))
		if err != nil {
			return nil, err
		}
		sum := sha256.Sum256(content)
		found[e.Name()] = hex.EncodeToString(sum[:])
	}
	return found, nil
}

// showSecrets shows the digests of the secrets that were loaded at the start or the last SIGHUP, and of the files now.
func (a *app) showSecrets(w http.ResponseWriter, _ *http.Request) {
	files, err := a.readSecrets()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]digests{"loaded": *a.secrets.Load(), "files": files})
}
