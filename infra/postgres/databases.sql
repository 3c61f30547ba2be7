-- Run once, when PostgreSQL makes its data folder: a database each for Prefect and MLflow.
CREATE DATABASE prefect;
CREATE DATABASE mlflow;
\connect prefect
CREATE EXTENSION IF NOT EXISTS pg_trgm;
