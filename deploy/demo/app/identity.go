package main

import (
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/golang-jwt/jwt/v5"
)

// maxAnswer bounds what the app reads of the hub.
const maxAnswer = 1 << 20

// account is the service account of the app instance, as the node delivers it.
type account struct {
	HubURL           string `json:"hub_url"`
	HubCAPEM         string `json:"hub_ca_pem"`
	ProjectID        string `json:"project_id"`
	AppInstanceID    string `json:"app_instance_id"`
	ServiceAccountID string `json:"service_account_id"`
	KeyID            string `json:"key_id"`
	PrivateKeyPEM    string `json:"private_key_pem"`
	NodeID           string `json:"node_id"`
	NodePublicKeyPEM string `json:"node_public_key_pem"`
}

// identity reads the app's own instance from the hub. It reads the file anew each time: the node replaces it.
func (a *app) identity(w http.ResponseWriter, r *http.Request) {
	own, err := readAccount(os.Getenv("GPUAAS_PARAMETERS_DIR"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusNotFound)
		return
	}
	instance, err := own.instance(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{
		"service_account_id": own.ServiceAccountID, "key_id": own.KeyID, "node_id": own.NodeID, "instance": instance,
	})
}

func readAccount(dir string) (own account, err error) {
	raw, err := os.ReadFile(filepath.Join(dir, "service-account.json"))
	if err == nil {
		err = json.Unmarshal(raw, &own)
	}
	return own, err
}

func (c account) instance(r *http.Request) (json.RawMessage, error) {
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM([]byte(c.HubCAPEM))
	hub := &http.Client{
		Timeout:   5 * time.Second,
		Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS13}},
	}
	defer hub.CloseIdleConnections()
	assertion, err := c.assertion(time.Now())
	if err != nil {
		return nil, err
	}
	ask, err := http.NewRequestWithContext(r.Context(), http.MethodPost, c.HubURL+"/api/v1/auth/service-account/token",
		strings.NewReader(`{"grant_type":"urn:ietf:params:oauth:grant-type:jwt-bearer","assertion":"`+assertion+`"}`))
	if err != nil {
		return nil, err
	}
	ask.Header.Set("Content-Type", "application/json")
	raw, err := answer(hub, ask)
	if err != nil {
		return nil, err
	}
	var token struct {
		AccessToken string `json:"access_token"`
	}
	if err := json.Unmarshal(raw, &token); err != nil {
		return nil, err
	}
	ask, err = http.NewRequestWithContext(r.Context(), http.MethodGet, c.HubURL+"/api/v1/projects/"+c.ProjectID+
		"/app-instances/"+c.AppInstanceID, nil)
	if err != nil {
		return nil, err
	}
	ask.Header.Set("Authorization", "Bearer "+token.AccessToken)
	return answer(hub, ask)
}

// assertion is the RFC 7523 assertion that the hub gives a token for.
func (c account) assertion(now time.Time) (string, error) {
	block, _ := pem.Decode([]byte(c.PrivateKeyPEM))
	if block == nil {
		return "", errors.New("the private key is not PEM")
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return "", errors.New("the private key cannot be read")
	}
	t := jwt.NewWithClaims(jwt.SigningMethodEdDSA, jwt.RegisteredClaims{
		Issuer: c.ServiceAccountID, Subject: c.ServiceAccountID, Audience: jwt.ClaimStrings{"gpuaas"}, ID: rand.Text(),
		IssuedAt: jwt.NewNumericDate(now), ExpiresAt: jwt.NewNumericDate(now.Add(time.Minute)),
	})
	t.Header["kid"] = c.KeyID
	return t.SignedString(key)
}

func answer(hub *http.Client, ask *http.Request) ([]byte, error) {
	resp, err := hub.Do(ask)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	raw, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("the hub answers %s", resp.Status)
	}
	return raw, err
}
